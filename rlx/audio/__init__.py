"""Audio: from samples to rows of a text model. Between the weights and the runners, beside `rlx.vision`.

`audio.py` reads a clip, `projection.py` makes rows of it. There is no tower: the only models whose audio rlx takes
(Gemma 4 unified) multiply frames of samples by a matrix.
"""
