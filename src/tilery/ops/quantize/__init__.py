"""Numbers in other formats: fp8 with scales (quantize_fp8, dequantize_fp8), and plain casts."""
