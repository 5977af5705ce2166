"""Virtual hosts: network namespaces with rate-limited links, built, measured and supervised."""
