"""Messages between two ranks: send and receive with tags, in the order that MPI specifies."""
