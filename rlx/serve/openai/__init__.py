"""OpenAI's API: chat, completions, embeddings and models, with the fields of vLLM and llama-server that fit."""
