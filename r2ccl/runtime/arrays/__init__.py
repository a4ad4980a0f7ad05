"""Views of the caller's arrays in host or GPU memory, outputs like them, and their streams."""
