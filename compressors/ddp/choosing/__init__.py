"""What `auto` does: pairs of compressor and collective are priced, tried, chosen for each layer, and watched."""
