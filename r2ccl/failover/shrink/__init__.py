"""The survivors of a communicator agree on who they are and go on."""
