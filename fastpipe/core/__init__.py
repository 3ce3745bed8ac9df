"""What every kind of data uses."""
