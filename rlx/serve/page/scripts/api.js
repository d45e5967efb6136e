// The server: requests, streamed answers, and failures in words. Addresses are relative to the page, so that it also
// works behind a proxy's path.

import { readEvents } from "./sse.js";

const KEY = "rlx.key";

/** The API key: kept until the tab closes, or in this browser if the user wishes so. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY) ?? "",
  set(key, keep) {
    this.forget();
    (keep ? localStorage : sessionStorage).setItem(KEY, key);
  },
  forget() {
    sessionStorage.removeItem(KEY);
    localStorage.removeItem(KEY);
  },
};

/** A request that was not answered: `kind` is key, busy, loading, context, network, refused (4xx) or server (5xx). */
export class Failure extends Error {
  constructor(kind, message, details = {}) {
    super(message);
    this.kind = kind;
    Object.assign(this, details);
  }
}

async function request(path, options = {}) {
  const headers = { ...(options.body && { "Content-Type": "application/json" }) };
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("network", "The server does not answer. Is it still running?");
  }
  if (!response.ok) throw failureOf(response.status, await response.text().catch(() => ""), response.headers);
  return response;
}

export async function getJson(path) {
  const response = await request(path);
  return response.json();
}

/** The failure that a status and a body of the server mean. */
export function failureOf(status, body, headers = new Headers()) {
  let error = {};
  try {
    const data = JSON.parse(body);
    error = typeof data.error === "string" ? { message: data.error } : (data.error ?? {});
  } catch {
    // not JSON: a proxy's page, say
  }
  const said = typeof error.message === "string" && error.message ? error.message : `The server answered with status ${status}.`;
  const retryAfter = Number(headers.get("Retry-After")) || null;
  if (status === 401) return new Failure("key", said, { status });
  if (status === 429) return new Failure("busy", said, { status, retryAfter });
  if (status === 503) return new Failure("loading", said, { status, retryAfter });
  if (error.type === "exceed_context_size_error" || error.code === "context_length_exceeded") {
    return new Failure("context", said, { status, tokens: error.n_prompt_tokens, limit: error.n_ctx });
  }
  return new Failure(status >= 500 ? "server" : "refused", said, { status, parameter: error.param ?? null });
}

/** The chunks of a streamed answer. Throws Failure; "network" if the stream ends before its "[DONE]". */
export async function* streamChat(body, signal) {
  const response = await request("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
  try {
    for await (const data of readEvents(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw failureOf(Number.isInteger(chunk.error.code) ? chunk.error.code : 500, data);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof Failure || error.name === "AbortError") throw error;
    throw new Failure("network", "The connection broke.");
  }
  throw new Failure("network", "The connection broke before the answer was complete.");
}
