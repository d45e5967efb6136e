"""Files of requests in OpenAI's batch form, answered without HTTP: `rlx batch`."""
