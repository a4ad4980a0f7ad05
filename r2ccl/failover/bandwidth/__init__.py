"""What each rail carries, measured from the slices it carries, and the shares that follow."""
