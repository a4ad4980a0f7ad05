"""When a path that failed is probed, and when it may carry work again."""
