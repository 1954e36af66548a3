// The page: one model at a time, four views. The address says which: #look, #look/apple, or #/model/look/apple.

import { cancel, get } from "./api.js";
import { byId, complain, fill, h, progressBar, question } from "./dom.js";
import { Ask } from "./ask.js";
import { Draw } from "./draw.js";
import { Look } from "./look.js";
import { CHANGED, NOW, address, isActive, refresh, state, watch } from "./model.js";
import { Teach } from "./teach.js";
import { T } from "./texts.js";

for (const element of document.querySelectorAll("[data-text]")) element.textContent = T[element.dataset.text];
for (const element of document.querySelectorAll("[data-label]")) element.setAttribute("aria-label", T[element.dataset.label]);

const views = {
  teach: new Teach(byId("view-teach")),
  ask: new Ask(byId("view-ask")),
  draw: new Draw(byId("view-draw")),
  look: new Look(byId("view-look")),
};
let open = null;

document.addEventListener(CHANGED, () => {
  byId("summary").textContent = T.knows(state.about);
  byId("tab-draw").hidden = !state.about.drawings;
  fill(byId("classes"), state.about.classes.map((c) => h("option", { value: c.name })));
  if (open) views[open].show(route().detail);
});

// ---------------------------------------------------------------------- jobs, wherever they were started

const bars = new Map();
document.addEventListener(NOW, () => {
  const active = state.jobs.filter(isActive);
  for (const id of bars.keys()) if (!active.some((job) => job.id === id)) (bars.get(id).element.remove(), bars.delete(id));
  for (const job of active) {
    if (job.elapsed !== null && job.elapsed < 0.3 && !bars.has(job.id)) continue; // it may be over in a moment
    if (!bars.has(job.id)) {
      bars.set(job.id, progressBar(T.jobTitles[job.kind] ?? job.kind, () => cancel(job).catch(complain)));
      byId("jobs").append(bars.get(job.id).element);
    }
    bars.get(job.id).show(job);
  }
});

// ---------------------------------------------------------------------- addresses

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  const model = location.hash.startsWith("#/") ? parts.shift() : null;
  return { model, view: parts[0], detail: parts[1] ?? null };
}

function follow() {
  const { model, view, detail } = route();
  if (model && model !== state.name && state.models.some((m) => m.name === model)) return choose(model).catch(complain);
  if (views[view] && !byId(`tab-${view}`).hidden) show(view, detail);
  else if (!open) show(state.about.drawings ? "draw" : state.about.classes.length ? "ask" : "teach");
}

function show(name, detail = null) {
  if (open && open !== name) views[open].leave();
  for (const other of Object.keys(views)) {
    const tab = byId(`tab-${other}`);
    tab.setAttribute("aria-selected", String(other === name));
    tab.tabIndex = other === name ? 0 : -1;
    byId(`view-${other}`).hidden = other !== name;
  }
  open = name;
  views[name].show(detail);
}

window.addEventListener("hashchange", follow);
byId("skip").addEventListener("click", (event) => (event.preventDefault(), byId("main").focus()));

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) tab.addEventListener("click", () => (location.hash = address(tab.id.slice(4))));
document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const shown = tabs.filter((tab) => !tab.hidden);
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const next = shown[(shown.indexOf(document.activeElement) + step + shown.length) % shown.length];
  next.focus();
  next.click();
});

for (const name of ["dragover", "drop"]) window.addEventListener(name, (event) => event.preventDefault());

// ---------------------------------------------------------------------- theme and phone

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

byId("phone").addEventListener("click", async () => {
  try {
    const { url, code } = await get("/phone");
    const says = url
      ? [h("p", {}, T.phoneHelp), h("img", { src: code, alt: T.phoneCode, class: "code" }), h("p", { class: "address" }, url), h("p", { class: "hint" }, T.phoneWarning)]
      : [h("p", {}, T.phoneOff), h("pre", {}, T.phoneCommand)];
    await question(T.phoneTitle, says, T.done, { no: null });
  } catch (error) {
    complain(error);
  }
});

// ---------------------------------------------------------------------- start

async function choose(name) {
  state.name = name;
  state.path = encodeURIComponent(name);
  Object.assign(state, { jobs: [], uploads: [] });
  if (open) views[open].leave();
  open = null;
  for (const view of Object.values(views)) view.forget();
  byId("model").value = name;
  await refresh();
  follow();
}

async function start() {
  const { models, efforts } = await get("/models");
  Object.assign(state, { models, efforts });
  if (!models.length) throw new Error(T.noModel);
  if (models.length > 1) {
    byId("model").hidden = false;
    fill(byId("model"), models.map((m) => h("option", { value: m.name }, m.name)));
    byId("model").addEventListener("change", (event) => {
      location.hash = `#/${encodeURIComponent(event.target.value)}/${open}`;
    });
  }
  const { model } = route();
  await choose(models.some((m) => m.name === model) ? model : models[0].name);
  document.body.classList.add("ready");
  watch();
}

start().catch(complain);
