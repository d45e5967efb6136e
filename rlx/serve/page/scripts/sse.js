// Server-sent events: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream

/** Joins pieces of a stream of events, however they are cut, to the data of whole events. Comments keep it alive only. */
export class EventReader {
  #rest = "";
  #data = [];

  /** The data of the events that this piece completes. */
  push(piece) {
    const lines = (this.#rest + piece).split(/\r\n|\n|\r(?!$)/); // a last "\r" may be half of "\r\n"
    this.#rest = lines.pop();
    const events = [];
    for (const line of lines) {
      if (line === "" && this.#data.length) {
        events.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return events;
  }
}

/** The data of each event of a response's body. */
export async function* readEvents(body) {
  const reader = new EventReader();
  const decoder = new TextDecoder();
  const source = body.getReader();
  try {
    for (;;) {
      const { done, value } = await source.read();
      if (done) return;
      yield* reader.push(decoder.decode(value, { stream: true }));
    }
  } finally {
    source.cancel().catch(() => {}); // a reader that goes away early lets the server stop
  }
}
