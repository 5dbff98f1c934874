"""The mlx engine: every mixture of experts that mlx-lm has, on stock mlx and mlx-lm, its experts streamed.

Streamed equals resident, bit for bit, at the same chunk boundaries and the same build of mlx.
"""
