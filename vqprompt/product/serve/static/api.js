// Talks to the server. A token, if the server wants one, comes from the address (#token=…) or from the person.

import { h, question } from "./dom.js";
import { T } from "./texts.js";

const KEPT = "vqprompt-token";
export const ENDED = ["done", "failed", "cancelled"];

const given = new URLSearchParams(location.hash.slice(1)).get("token");
if (given) {
  sessionStorage.setItem(KEPT, given);
  history.replaceState(null, "", location.pathname);
}

async function askForToken(wasWrong) {
  const input = h("input", { type: "password", autocomplete: "current-password", required: true, "aria-label": T.token });
  const says = wasWrong ? h("p", { class: "bad", role: "alert" }, T.tokenWrong) : h("p", {}, T.tokenHelp);
  if (!(await question(T.tokenTitle, [says, input], T.tokenGo))) throw new Error(T.tokenNone);
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
    throw new Error(T.noAnswer);
  }
  if (answer.status === 401) {
    if (token === sessionStorage.getItem(KEPT)) asking ??= askForToken(Boolean(token)).finally(() => (asking = null));
    await asking;
    return request(path, options);
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => ({}));
    throw new Error(body.error || T.status(answer.status));
  }
  return answer;
}

const json = { "Content-Type": "application/json" };

export const get = async (path) => (await request(path)).json();

export const post = async (path, body) => (await request(path, { method: "POST", headers: json, body: JSON.stringify(body) })).json();

export const patch = async (path, body) => (await request(path, { method: "PATCH", headers: json, body: JSON.stringify(body) })).json();

export const send = async (path, body, options = {}) => (await request(path, { method: "POST", body, ...options })).json();

export const remove = (path) => request(path, { method: "DELETE" });

/** Wait until a job has ended. Resolves to its result; null if it was cancelled. */
export async function ended(job) {
  while (!ENDED.includes(job.state)) job = await get(`/jobs/${job.id}?wait=20`);
  if (job.state === "failed") throw new Error(job.error);
  return job.state === "done" ? job.result : null;
}

export const cancel = (job) => post(`/jobs/${job.id}/cancel`, {});

/** A picture from the server as an <img>; it is fetched when it comes into view. */
export function picture(path, alt) {
  const image = h("img", { alt, class: "thumb", onload: () => URL.revokeObjectURL(image.src) });
  const seen = new IntersectionObserver(async ([entry]) => {
    if (!entry.isIntersecting) return;
    seen.disconnect();
    try {
      image.src = URL.createObjectURL(await (await request(path)).blob());
    } catch {
      image.classList.add("broken");
    }
  });
  seen.observe(image);
  return image;
}
