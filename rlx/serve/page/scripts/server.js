// What the server says of itself: the model, its context, what it takes, and how it samples unless told otherwise.

import { getJson } from "./api.js";

export const server = {
  ready: false,
  model: "", // the name that requests carry
  context: null, // tokens
  sees: false,
  thinks: false,
  defaults: {}, // sampling, by the names of a request

  /** Asks the server. Throws Failure. */
  async load() {
    const [models, props] = await Promise.all([getJson("v1/models"), getJson("props")]);
    const entry = models.data[0];
    const generation = props.default_generation_settings ?? {};
    this.model = entry.id;
    this.context = generation.n_ctx ?? entry.max_model_len ?? entry.meta?.n_ctx ?? null;
    this.sees = props.modalities?.vision === true;
    this.thinks = typeof props.chat_template === "string" && props.chat_template.includes("enable_thinking");
    this.defaults = generation.params ?? {};
    this.version = props.build_info ?? "";
    this.ready = true;
  },
};
