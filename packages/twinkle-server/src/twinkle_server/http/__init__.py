"""What requests go through on their way to the routes."""
