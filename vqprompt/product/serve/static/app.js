// The page: one model at a time, four views.

import { get } from "./api.js";
import { byId, complain, h, percent, plural } from "./dom.js";
import { Ask } from "./ask.js";
import { Draw } from "./draw.js";
import { Look } from "./look.js";
import { CHANGED, refresh, state } from "./model.js";
import { Teach } from "./teach.js";

const views = {
  teach: new Teach(byId("view-teach")),
  ask: new Ask(byId("view-ask")),
  draw: new Draw(byId("view-draw")),
  look: new Look(byId("view-look")),
};
let open = null;

document.addEventListener(CHANGED, () => {
  const { classes, accuracy } = state.about;
  byId("summary").textContent = classes.length
    ? `${plural(classes.length, "class", "classes")}${accuracy === null ? "" : ` · ${percent(accuracy)} right`}`
    : "knows nothing yet";
  byId("tab-draw").hidden = !state.about.drawings;
  let names = byId("classes");
  if (!names) document.body.append((names = h("datalist", { id: "classes" })));
  names.replaceChildren(...classes.map((c) => h("option", { value: c.name })));
  if (open === "look") views.look.show();
});

function show(name) {
  if (open === name || !views[name] || byId(`tab-${name}`).hidden) return;
  if (open) views[open].leave();
  for (const other of Object.keys(views)) {
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    byId(`view-${other}`).hidden = other !== name;
  }
  open = name;
  history.replaceState(null, "", `#${name}`);
  views[name].show();
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) tab.addEventListener("click", () => show(tab.id.slice(4)));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const shown = tabs.filter((tab) => !tab.hidden);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
  next.focus();
  show(next.id.slice(4));
});

for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());

const KEPT = "vqprompt-theme";
const setTheme = (theme) => theme && (document.documentElement.dataset.theme = theme);
setTheme(localStorage.getItem(KEPT));
byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(dark ? "light" : "dark");
  localStorage.setItem(KEPT, dark ? "light" : "dark");
});

async function choose(name) {
  state.name = name;
  state.path = encodeURIComponent(name);
  await refresh();
  for (const view of Object.values(views)) view.started = false;
  const wanted = open ?? (views[location.hash.slice(1)] ? location.hash.slice(1) : state.about.drawings ? "draw" : state.about.classes.length ? "ask" : "teach");
  open = null;
  show(byId(`tab-${wanted}`).hidden ? "teach" : wanted);
}

async function start() {
  const wanted = location.hash;
  const { models, efforts } = await get("/models");
  Object.assign(state, { models, efforts });
  if (wanted) history.replaceState(null, "", wanted);
  if (!models.length) throw new Error("This server has no model.");
  if (models.length > 1) {
    byId("chooser").hidden = false;
    byId("model").append(...models.map((m) => h("option", { value: m.name }, m.name)));
    byId("model").addEventListener("change", (event) => choose(event.target.value).catch(complain));
  }
  await choose(models[0].name);
  document.body.classList.add("ready");
}

start().catch(complain);
