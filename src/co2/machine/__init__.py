"""What a process has to work with: device, memory, terminal, other processes; and where its numbers come from."""
