"""What this machine is: its devices, what is known of GPUs that are not here, clock and power while it runs."""
