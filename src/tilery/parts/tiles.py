"""Matrix products cut into tiles: what a tile costs, for the tuner's model."""

from tilery.base.spec import TensorSpec, Work


def tiled_product(a: TensorSpec, b: TensorSpec, tile_m: int, tile_n: int, blocks_per_tile: int = 1) -> Work:
    """Of c [M, N] = a [M, K] · b [K, N]. A tile over the edge multiplies zeros, and reads none of them."""
    (m, k), n = a.shape, b.shape[1]
    tiles = -(-m // tile_m) * -(-n // tile_n)
    height, width = min(tile_m, m), min(tile_n, n)
    nbytes = ((height + width) * k + height * width) * a.dtype.itemsize
    return Work(tiles * blocks_per_tile, 2 * tile_m * tile_n * k // blocks_per_tile, nbytes // blocks_per_tile)
