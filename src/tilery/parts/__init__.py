"""What the kernels and contracts of several ops share: by what it is about, or <language>_<what> for kernels."""
