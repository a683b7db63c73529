"""return_computers."""
