"""Export: models written as GGUF files, from GGUF or safetensors, in the types people run.

After weights and text, beside the runners: `model.py` presents a source in GGUF's terms, `mix.py` chooses types,
`quantizers.py` makes their bytes, `writer.py` writes the file. `convert.py` and `quantize.py` put them together.
"""
