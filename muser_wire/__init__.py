"""What both nodes must agree on: identities, geometry, the wire, and the model as data.

This package imports neither torch nor mlx, so that each node installs one of them only.
"""
