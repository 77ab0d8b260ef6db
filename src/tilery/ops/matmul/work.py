"""Work of one block of a tiled product, for the tuner's model."""

from tilery.base.spec import Work


def gemm_work(m: int, n: int, k: int, itemsize: int, tile_m: int, tile_n: int, blocks_per_tile: int = 1) -> Work:
    """c [M, N] = a [M, K] · b [K, N]. A tile over the edge multiplies zeros, and reads none of them."""
    tiles = -(-m // tile_m) * -(-n // tile_n)
    height, width = min(tile_m, m), min(tile_n, n)
    nbytes = ((height + width) * k + height * width) * itemsize
    return Work(tiles * blocks_per_tile, 2 * tile_m * tile_n * k // blocks_per_tile, nbytes // blocks_per_tile)


def batched_work(tiles: int, rows: int, n: int, k: int, itemsize: int, tile_m: int, tile_n: int) -> Work:
    """`tiles` tiles of matrices of about `rows` rows. What lies over an edge is multiplied, but not read."""
    height, width = min(tile_m, rows), min(tile_n, n)
    return Work(tiles, 2 * tile_m * tile_n * k, ((height + width) * k + height * width) * itemsize)
