"""The commands of `embedfuse`, one a file."""
