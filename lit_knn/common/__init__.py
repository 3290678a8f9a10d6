"""What every other room uses: errors, random streams, files, ranks, memory."""
