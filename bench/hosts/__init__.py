"""Virtual hosts: build, measure and supervise network namespaces with rate-limited links."""
