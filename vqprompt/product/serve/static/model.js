// The model that the page shows, and changes of it. Views import this module; only app.js knows the views.

import { follow, get, post } from "./api.js";
import { complain, plural, toast } from "./dom.js";

/** What all views share. path: the model's name, for addresses. about: what GET /models/{name} says. */
export const state = { name: null, path: null, about: null, models: [], efforts: {} };

/** Sent to the document when `state.about` is new. */
export const CHANGED = "model-changed";

/** Ask the server what the model knows now. */
export async function refresh() {
  state.about = await get(`/models/${state.path}`);
  document.dispatchEvent(new Event(CHANGED));
}

/** Change the model: wait for the job to end, then show `message`. */
export async function change(what, body, message, undoable = true) {
  try {
    await follow(await post(`/models/${state.path}/${what}`, body));
    await refresh();
    toast(message, { action: undoable ? ["Undo", () => undo(1)] : null });
  } catch (error) {
    complain(error);
  }
}

export const undo = (steps) => change("undo", { steps }, `Undone: ${plural(steps, "change")}.`, false);
