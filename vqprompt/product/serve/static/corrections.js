// Corrections: rename, merge, forget, relabel, unlearn. Where answers may change, the page says how many before it is done.

import { ended, post } from "./api.js";
import { complain, h, question, toast } from "./dom.js";
import { change, state } from "./model.js";
import { whatChanges } from "./review.js";
import { T } from "./texts.js";

/** Try a change out, show what it would do, and do it if the person wants it. */
async function tried(what, body, title, message) {
  try {
    const result = await ended(await post(`/models/${state.path}/${what}`, { ...body, preview: true }));
    if (result === null) return;
    if (!Object.keys(result.classes).length) return void toast(result.notes.at(-1)); // nothing to do
    const says = [result.accuracy !== null && h("p", {}, T.accuracyWould(result)), whatChanges(result), result.notes.map((note) => h("p", { class: "hint" }, note))];
    if (await question(title, says, T.goOn)) await change(what, body, message);
  } catch (error) {
    complain(error);
  }
}

export const relabel = (images, label) => tried("relabel", { images, label }, T.correctTitle(images.length, label), T.corrected(images.length, label));

export const unlearn = (images) => tried("unlearn", { images }, T.unlearnTitle(images.length), T.unlearned(images.length));

export async function merge(name) {
  const others = state.about.classes.map((c) => c.name).filter((other) => other !== name);
  const choice = h("select", { id: "merge-with", "aria-label": T.mergeWith }, others.map((other) => h("option", { value: other }, other)));
  if (!(await question(T.mergeTitle(name), [h("label", {}, T.mergeWith, " ", choice), h("p", { class: "hint" }, T.mergeHelp(name))], T.goOn))) return;
  await tried("merge", { names: [name, choice.value], new: name }, T.mergeTitle(name), T.merged(name, choice.value));
}

export async function rename(old) {
  const input = h("input", { type: "text", value: old, required: true, maxlength: "200", "aria-label": T.newName, id: "new-name" });
  if (!(await question(T.renameTitle(old), [input], T.rename))) return;
  const name = input.value.trim();
  if (name && name !== old) await change("rename", { old, new: name }, T.renamed(old, name));
}

export async function forget(name) {
  const box = h("input", { type: "checkbox" });
  const fields = [h("p", {}, T.forgetHelp), h("label", { class: "check" }, box, T.forGood)];
  if (!(await question(T.forgetTitle(name), fields, T.forget, { danger: true }))) return;
  await change("forget", { name, for_good: box.checked }, T.forgotten(name), !box.checked);
}

export async function returnTo(version) {
  if (!(await question(T.returnTitle(version), [h("p", {}, T.returnHelp)], T.returnGo))) return;
  await change("return", { version }, T.returned(version));
}
