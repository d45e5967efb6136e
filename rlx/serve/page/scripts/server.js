// What the server says of itself: the model, its context, what it takes, and how it samples unless told otherwise.

import { getJson } from "./api.js";
import { remember, remembered } from "./store.js";

export const server = {
  ready: false,
  models: [], // the names of all
  model: "", // the name that requests carry
  context: null, // tokens
  sees: false,
  thinks: false,
  defaults: {}, // sampling, by the names of a request
  facts: {}, // name -> value, to be shown

  /** Asks the server. Throws Failure. */
  async load() {
    const entries = (await getJson("v1/models")).data;
    const entry = entries.find(({ id }) => id === remembered("model", null)) ?? entries[0];
    const props = await getJson(`props?model=${encodeURIComponent(entry.id)}`);
    const generation = props.default_generation_settings ?? {};
    this.models = entries.map(({ id }) => id);
    this.model = entry.id;
    this.context = generation.n_ctx ?? entry.max_model_len ?? entry.meta?.n_ctx ?? null;
    this.sees = props.modalities?.vision === true;
    this.thinks = typeof props.chat_template === "string" && props.chat_template.includes("enable_thinking");
    this.defaults = generation.params ?? {};
    this.facts = {
      Model: entry.id,
      Family: props.family,
      Context: this.context && `${this.context.toLocaleString("en")} tokens`,
      "Computed on": props.target && `${props.target}, ${props.threads} thread${props.threads === 1 ? "" : "s"}`,
      Server: props.build_info,
    };
    this.ready = true;
  },

  /** The model of this name answers from the next `load` on. */
  choose(name) {
    remember("model", name);
    this.ready = false;
  },
};
