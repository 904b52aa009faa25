"""mlx-lm's server as it is, but with the BLAS of the product: by itself it would take the slow one of mlx's wheel."""

from __future__ import annotations

from muser_decode.blas import load_blas

BLAS = load_blas()

from mlx_lm.server import main  # noqa: E402, after the BLAS

if __name__ == "__main__":
    main()
