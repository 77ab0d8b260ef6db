"""Products of fp8 matrices with scales: per group and block of 128, or per row and tensor."""
