"""Export: writes models as GGUF files, from GGUF or safetensors, in the usual types.

After weights and text, beside the runners: `model.py` describes a source in GGUF's terms and writes the file,
`quantizers.py` encodes the values. `convert.py` and `quantize.py` combine them.
"""
