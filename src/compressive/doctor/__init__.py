"""What a bug report needs: versions, devices, decoders, memory, and a short check of each."""
