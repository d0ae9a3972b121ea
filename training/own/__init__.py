"""What training on one's own pictures needs beside the loop: a choice of preset, a head start, and signs of life."""
