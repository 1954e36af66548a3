// The model that the page shows. What it is doing is on the server, so all pages show the same: this module asks often.

import { ENDED, ended, get, post } from "./api.js";
import { complain, h, toast, warnings } from "./dom.js";
import { T } from "./texts.js";

const OFTEN = 300, SELDOM = 1000, HIDDEN = 4000; // ms between two questions: during a job, otherwise, in a hidden tab

/** What all views share. path: the model's name, for addresses. about: what GET /models/{name} says. jobs, uploads: what
 * GET /models/{name}/state says. */
export const state = { name: null, path: null, about: null, models: [], efforts: {}, jobs: [], uploads: [] };

/** Sent to the document when `state.about` is new, and when jobs or uploads are. */
export const CHANGED = "model-changed", NOW = "state-changed";

export const isActive = (job) => !ENDED.includes(job.state);

/** The address of a view, and of a class in it. */
export function address(view, detail = null) {
  const parts = [...(state.models.length > 1 ? ["", state.name] : []), view, ...(detail === null ? [] : [detail])];
  return `#${parts.map(encodeURIComponent).join("/")}`;
}

/** Ask the server what the model knows now. Two questions at the same time have one answer, which is told once. */
export async function refresh() {
  const before = state.about, about = await get(`/models/${state.path}`);
  const known = state.about !== before && about.name === state.about.name && about.version === state.about.version;
  state.about = about;
  if (!known) document.dispatchEvent(new Event(CHANGED));
}

/** Ask what is happening. */
export async function lookNow() {
  const path = state.path;
  const { version, jobs, uploads } = await get(`/models/${path}/state`);
  if (path !== state.path) return;
  if (version !== state.about.version) await refresh();
  Object.assign(state, { jobs, uploads });
  document.dispatchEvent(new Event(NOW));
}

/** Keep asking, for as long as the page is open. */
export async function watch() {
  let answers = true;
  for (;;) {
    try {
      await lookNow();
      answers = true;
    } catch (error) {
      if (answers) complain(error);
      answers = false;
    }
    const pause = document.hidden || !answers ? HIDDEN : state.jobs.some(isActive) ? OFTEN : SELDOM;
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** Change the model: wait for the job to end, then show `message`. */
export async function change(what, body, message, undoable = true) {
  try {
    const job = await post(`/models/${state.path}/${what}`, body);
    const result = await ended(job);
    await lookNow();
    if (result === null) toast(T.cancelled);
    else if (undoable) changed(message, result);
    else toast(message);
  } catch (error) {
    complain(error);
  }
}

/** Say what was changed and what is worse now, and offer to undo it until the model changes again. */
export function changed(message, result, notes = []) {
  const lost = warnings(result), says = [message, notes.map((note) => h("p", {}, note)), lost];
  const note = toast(says, { bad: Boolean(lost), action: [T.undo, () => undo(1)], stays: lost || notes.length > 0 });
  document.addEventListener(CHANGED, () => note.remove(), { once: true });
}

/** If somebody has changed the model since the page was told, nothing is undone. */
export const undo = (steps) => change("undo", { steps, version: state.about.version }, T.undone(steps), false);
