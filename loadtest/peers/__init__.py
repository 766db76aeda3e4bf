"""Convoy beside other servers, on the same work in the same hour: `python -m convoy.loadtest.peers`.

Each peer is a folder: `peer.toml` says what it can do, `requirements.txt` pins its environment, `serve.py` is its
server. To add one, add a folder, here or in the folder named by `--peers-from`.
"""
