"""Vision: from an image to rows of a text model. Between the weights and the runners.

`image.py` reads an image, `processors.py` resizes it and cuts it into patches as the family's reference processor does,
`tower.py` runs the family's tower over the patches. The equations of the towers are in `rlx.models`.
"""
