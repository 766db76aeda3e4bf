"""Every classification network of torchvision through the pipeline, as a page: `python -m convoy.export.zoo_table`.

Knows registries, random pictures, records and the page. A development program: it is in no wheel.
"""
