"""Zero-copy views of the caller's arrays, of any array library, in host or GPU memory."""
