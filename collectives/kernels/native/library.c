/* What the loader asks before it trusts a library. */

#ifndef SOURCES
#define SOURCES ""
#endif

/* The digest of the sources that this was compiled from. */
const char *sources_digest(void) { return SOURCES; }
