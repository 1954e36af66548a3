// Talks to the server. A token, if the server wants one, comes from the address (#token=…) or from the person.

import { h, question } from "./dom.js";

const KEPT = "vqprompt-token";

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEPT, given);
  history.replaceState(null, "", location.pathname);
}

async function askForToken() {
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, "aria-label": "Token" });
  const given = await question("This server needs a token", [h("p", {}, "It was set with --token or VQPROMPT_TOKEN."), input], "Continue");
  if (!given) throw new Error("This page needs the token. Load it again to enter the token.");
  sessionStorage.setItem(KEPT, input.value);
}

let asking = null; // one question, even if several requests need the token

/** A request. If the server refuses it, this throws an Error with the server's message. */
export async function request(path, options = {}) {
  const token = sessionStorage.getItem(KEPT);
  const headers = { ...options.headers, ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is it still running?");
  }
  if (answer.status === 401) {
    asking ??= askForToken().finally(() => (asking = null));
    await asking;
    return request(path, options);
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error || `The server answered with status ${answer.status}.`);
  }
  return answer;
}

export const get = async (path) => (await request(path)).json();

export const post = async (path, body) =>
  (await request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) })).json();

export const send = async (path, body, options = {}) => (await request(path, { method: "POST", body, ...options })).json();

export const remove = (path) => request(path, { method: "DELETE" });

/** Follow a job by server-sent events until it has ended. Resolves to its result; null if it was cancelled. */
export async function follow(job, show = () => {}) {
  show(job);
  while (true) {
    const answer = await request(`/jobs/${job.id}/events`);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let held = "";
    try {
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        held += value;
        const events = held.split("\n\n");
        held = events.pop();
        for (const event of events) {
          job = JSON.parse(event.slice(event.indexOf("data: ") + 6));
          show(job);
        }
      }
    } catch {
      // the connection broke, but the job continues: connect again
    }
    if (job.state === "done") return job.result;
    if (job.state === "cancelled") return null;
    if (job.state === "failed") throw new Error(job.error);
    await new Promise((resolve) => setTimeout(resolve, 500));
  }
}

export const cancel = (job) => post(`/jobs/${job.id}/cancel`, {});

/** A picture from the server as an <img>. */
export function picture(path, alt) {
  const image = h("img", { alt, class: "thumb" });
  request(path)
    .then((answer) => answer.blob())
    .then((blob) => (image.src = URL.createObjectURL(blob)))
    .catch(() => image.classList.add("broken"));
  return image;
}
