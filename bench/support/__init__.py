"""What several programs need: models, machines and times, and servers that end when the program does."""
