"""What a run will take: measured steps, and plan=true."""
