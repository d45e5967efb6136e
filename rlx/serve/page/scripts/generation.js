// One answer while it is written: asks the server, and fills a message with what arrives.

import { Failure, streamChat } from "./api.js";
import { requestBody } from "./conversation.js";

const MAX_TRIES = 30;

/** The fields of an answer of which nothing has arrived. */
export const newAnswer = (settings, model) => ({
  role: "assistant", text: "", thinking: "", calls: [], model, finish: "", problem: "", json: settings.format !== "text", stats: {},
});

export class Generation {
  #controller = new AbortController();
  #wake = null;

  /** `hooks`: changed(generation) after each piece, needsKey(failure) -> whether the user gave a key. */
  constructor(conversation, message, hooks) {
    this.conversation = conversation;
    this.message = message;
    this.hooks = hooks;
    this.waiting = ""; // why nothing is written at the moment, in words
    this.progress = null; // the part of the prompt that is computed, 0 to 1
    this.failure = null;
    this.started = performance.now();
    this.first = null; // when the first token arrived
    this.thought = null; // when thinking ended
    this.pieces = 0;
    this.before = message.text; // of an answer that is continued
  }

  stop() {
    this.#controller.abort();
    this.#wake?.();
  }

  /** Runs to the end; what went wrong stands in the message. */
  async run(path, model) {
    const { message } = this;
    try {
      const body = requestBody(path, this.conversation.settings, model);
      for (let tries = 1; ; tries += 1) {
        try {
          await this.#stream(body);
          break;
        } catch (error) {
          if (!(await this.#mayRetry(error, tries))) throw error;
        }
      }
      message.finish ||= "stop";
    } catch (error) {
      this.#fail(error);
    }
    this.waiting = "";
    this.#measure();
    this.hooks.changed(this);
  }

  async #stream(body) {
    this.started = performance.now();
    for await (const chunk of streamChat(body, this.#controller.signal)) {
      this.waiting = "";
      this.#take(chunk);
      this.hooks.changed(this);
    }
  }

  #take(chunk) {
    const { message } = this;
    const choice = chunk.choices?.[0];
    const progress = choice?.prompt_progress ?? chunk.prompt_progress;
    if (progress?.total) this.progress = progress.processed / progress.total;
    const delta = choice?.delta ?? {};
    const thinking = delta.reasoning_content ?? delta.reasoning;
    if (thinking || delta.content || delta.tool_calls) {
      this.first ??= performance.now();
      this.pieces += 1;
    }
    if (thinking) message.thinking += thinking;
    if (delta.content) message.text += delta.content;
    if ((delta.content || delta.tool_calls) && message.thinking) this.thought ??= performance.now();
    for (const part of delta.tool_calls ?? []) takeCall(message.calls, part);
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    if (chunk.usage) takeUsage(message.stats, chunk.usage);
    if (chunk.timings) takeTimings(message.stats, chunk.timings);
    if (chunk.model) message.model = chunk.model;
  }

  /** Waits, if it makes sense to ask again: for a place in the queue, for the model to load, for a key. */
  async #mayRetry(error, tries) {
    if (!(error instanceof Failure) || this.pieces) return false;
    if (error.kind === "key") return this.hooks.needsKey(error);
    if ((error.kind !== "busy" && error.kind !== "loading") || tries >= MAX_TRIES) return false;
    const reason = error.kind === "busy" ? "The server is busy" : error.message.replace(/\.$/, "");
    for (let seconds = Math.min(Math.ceil(error.retryAfter ?? Math.min(tries, 5)), 60); seconds > 0; seconds -= 1) {
      this.waiting = `${reason}. Trying again in ${seconds} s`;
      this.hooks.changed(this);
      await new Promise((resolve) => {
        this.#wake = resolve;
        setTimeout(resolve, 1000);
      });
      this.#controller.signal.throwIfAborted();
    }
    this.waiting = "Asking again";
    this.hooks.changed(this);
    return true;
  }

  #fail(error) {
    const { message } = this;
    if (error.name === "AbortError") {
      message.finish = "stopped";
      return;
    }
    this.failure = error;
    const began = message.text !== this.before || message.thinking || message.calls.length;
    message.finish = began ? "broken" : "failed";
    message.problem = problemText(error, began);
  }

  #measure() {
    const { stats } = this.message;
    const now = performance.now();
    if (this.first !== null) stats.firstMs ??= this.first - this.started;
    if (this.message.thinking && this.first !== null) stats.thinkingMs ??= (this.thought ?? now) - this.first;
    if (stats.speed === undefined && stats.tokens > 1 && this.first !== null) {
      stats.speed = (1000 * (stats.tokens - 1)) / (now - this.first);
    }
  }

  /** Pieces a second so far: about the tokens a second. */
  speed() {
    const seconds = (performance.now() - this.first) / 1000;
    return this.pieces > 8 && seconds > 0.3 ? this.pieces / seconds : null;
  }
}

function takeCall(calls, part) {
  const call = (calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
  if (part.id) call.id = part.id;
  if (part.function?.name) call.name += part.function.name;
  if (part.function?.arguments) call.arguments += part.function.arguments;
}

function takeUsage(stats, usage) {
  stats.prompt = usage.prompt_tokens;
  stats.cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  stats.tokens = usage.completion_tokens;
}

function takeTimings(stats, timings) {
  stats.promptSpeed = timings.prompt_per_second;
  stats.promptMs = timings.prompt_ms;
  if (timings.predicted_n > 1) stats.speed = timings.predicted_per_second;
}

function problemText(error, began) {
  if (!(error instanceof Failure)) return error.message;
  if (error.kind === "context" && error.tokens && error.limit) {
    const [tokens, limit] = [error.tokens, error.limit].map((number) => number.toLocaleString("en"));
    return `This conversation has ${tokens} tokens; the model takes ${limit}. Begin a new one, or edit an earlier message to continue from there.`;
  }
  if (error.kind === "network" && began) return `${error.message} What had arrived is kept.`;
  if (error.kind === "busy") return `${error.message} Try again later.`;
  return error.message;
}
