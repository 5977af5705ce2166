/* The forwarder: a switch between the interfaces of virtual hosts, which holds every frame as long as its way would.

   A frame waits for its sender's uplink, may be lost, is delayed, and waits for its receiver's downlink. On each of these
   stages frames keep their order. Times are computed from those of the stage before, not from when this thread woke up,
   so lateness does not add up. One thread does all of it.

   Sources: Netravali et al. 2015 (Mahimahi, USENIX ATC), a link by its trace; Steele, Lea, Flood 2014 (fast splittable
   pseudorandom number generators, OOPSLA); Linux, sched_setattr(2), ppoll(2). */

#include <stddef.h>
#include <stdint.h>

/* What it calls of the C library, as 64-bit Linux has it: the process that loads this brings it, without headers. */
struct timespec { long tv_sec, tv_nsec; };
struct pollfd { int fd; short events, revents; };
enum { CLOCK_MONOTONIC = 1, POLLIN = 1, PR_SET_TIMERSLACK = 29 };
#ifdef __x86_64__
enum { SCHED_SETATTR = 314 };
#else
enum { SCHED_SETATTR = 274 };
#endif
int clock_gettime(int, struct timespec *);
int ppoll(struct pollfd *, unsigned long, const struct timespec *, const void *);
int prctl(int, ...);
long syscall(long, ...);
long read(int, void *, size_t), write(int, const void *, size_t);
void *malloc(size_t), *calloc(size_t, size_t), *memcpy(void *, const void *, size_t);

enum {
  HEADER_BYTES = 14,   /* to, from, kind */
  FRAME_BYTES = 1514,  /* the largest frame, and what one delivery opportunity of a trace carries */
  SLICE_NS = 100000,
  READ_AT_ONCE = 64,   /* frames of one host before the next one has its turn */
  JITTERS_PER_DRAW = 10
};
#ifndef SOURCES
#define SOURCES ""
#endif
/* What the loader asks: the digest of the sources that this was compiled from. */
const char *sources_digest(void) { return SOURCES; }

static const int64_t NS_PER_MS = 1000000, NS_PER_S = 1000000000, NEVER = INT64_MAX;
static const uint64_t LOSSES = 0x6c6f7373, DELAYS = 0x64656c61; /* what tells the two rows of random numbers apart */

/* One direction of a host's link: a rate, a trace, or neither. `bench.hosts.forwarder.forwarder` fills it in. */
typedef struct {
  double bytes_per_ns;    /* 0: no rate */
  const uint32_t *trace;  /* the millisecond of each delivery opportunity, ascending; the last one is the period, above 0 */
  int64_t trace_length;   /* 0: no trace */
  int64_t queue_bytes;    /* what may wait */
} Direction;

/* A host, as `bench.hosts.forwarder.forwarder` describes it; the last three are counted here. */
typedef struct {
  int32_t fd; /* reads and writes one frame at a time, and never blocks */
  uint32_t loss; /* so many frames in 2^32 are lost */
  Direction up, down;
  int64_t latency_ns, jitter_ns;
  /* Frames sent: on the receiver's downlink; lost on purpose; before a full queue, or not taken by the receiver. */
  uint64_t forwarded, lost, dropped;
} Host;

typedef struct {
  Host *hosts;
  int32_t num_hosts;
  int32_t stop_fd; /* the forwarder ends when this can be read */
  uint64_t seed;
  int64_t origin_ns; /* traces and random numbers begin here, by the monotonic clock; may be set anew at any time */
} Network;

typedef struct Frame {
  struct Frame *next;
  Host *sender;
  int64_t due; /* when it leaves its stage */
  int32_t length;
  unsigned char data[FRAME_BYTES];
} Frame;

typedef struct {
  Frame *first, *last;
  int64_t bytes;
} Queue;

/* A direction at work. */
typedef struct {
  const Direction *is;
  Queue queue;
  double free_at;      /* rate: when the last bit of the last frame has left */
  int64_t opportunity; /* trace: the one that is used next, counted from the origin */
  int64_t left;        /* trace: bytes that it still carries */
} Link;

typedef struct {
  Host *is;
  Link up, down;
  Queue flight;
  int64_t last_arrival;
  uint64_t launched; /* frames since the origin */
} Port;

static Frame *spare;

static int64_t monotonic_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * NS_PER_S + t.tv_nsec;
}

/* 64 random bits, the same for the same row and position. */
static uint64_t random_bits(uint64_t seed, uint64_t row, uint64_t position) {
  uint64_t z = seed + (row << 32) + position * 0x9e3779b97f4a7c15;
  for (int round = 0; round < 2; round++) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
  }
  return z;
}

static Frame *new_frame(void) {
  Frame *frame = spare;
  if (!frame) return malloc(sizeof *frame);
  spare = frame->next;
  return frame;
}

static void free_frame(Frame *frame) {
  frame->next = spare;
  spare = frame;
}

static void drop(Frame *frame) {
  frame->sender->dropped++;
  free_frame(frame);
}

static void append(Queue *queue, Frame *frame) {
  frame->next = NULL;
  if (queue->first) queue->last->next = frame;
  else queue->first = frame;
  queue->last = frame;
  queue->bytes += frame->length;
}

/* The first frame if it is due by `now`, taken off the queue. */
static Frame *take(Queue *queue, int64_t now) {
  Frame *frame = queue->first;
  if (!frame || frame->due > now) return NULL;
  queue->first = frame->next;
  queue->bytes -= frame->length;
  return frame;
}

static int64_t first_due(const Queue *queue) { return queue->first ? queue->first->due : NEVER; }

static int64_t opportunity_ns(const Direction *is, int64_t index) {
  int64_t period_ms = is->trace[is->trace_length - 1];
  return (index / is->trace_length * period_ms + is->trace[index % is->trace_length]) * NS_PER_MS;
}

/* Index of the first opportunity at or after `ns`, counted from the origin. */
static int64_t opportunity_from(const Direction *is, int64_t ns) {
  if (ns <= 0) return 0;
  int64_t period_ns = is->trace[is->trace_length - 1] * NS_PER_MS, low = 0, high = is->trace_length;
  int64_t round = (ns - 1) / period_ns; /* what lies on the end of a period belongs to it */
  while (low < high) {
    int64_t middle = (low + high) / 2, index = round * is->trace_length + middle;
    if (opportunity_ns(is, index) < ns) low = middle + 1;
    else high = middle;
  }
  return round * is->trace_length + low;
}

/* When the last bit of a frame that comes at `at` leaves; what was there before it goes first. */
static int64_t departure(Link *link, int64_t at, int64_t length, int64_t origin) {
  const Direction *is = link->is;
  if (is->trace_length) {
    if (opportunity_ns(is, link->opportunity) < at - origin) { /* nobody waited, so the time passed unused */
      link->opportunity = opportunity_from(is, at - origin);
      link->left = FRAME_BYTES;
    }
    for (; length > link->left; link->left = FRAME_BYTES) {
      length -= link->left;
      link->opportunity++;
    }
    link->left -= length;
    return origin + opportunity_ns(is, link->opportunity);
  }
  if (is->bytes_per_ns == 0) return at;
  if (link->free_at < at) link->free_at = at;
  link->free_at += length / is->bytes_per_ns;
  return link->free_at;
}

/* For tests: when frames of these lengths leave a direction to which they come at these times, without a limit to
   what may wait. */
void departures(const Direction *is, int64_t number, const int64_t *at, const int64_t *length, int64_t *left) {
  Link link = {.is = is, .left = FRAME_BYTES};
  for (int64_t i = 0; i < number; i++) left[i] = departure(&link, at[i], length[i], 0);
}

/* Let a frame wait for a link; 0 if the queue is full. */
static int enter(Link *link, Frame *frame, int64_t at, int64_t origin) {
  if (link->queue.bytes + frame->length > link->is->queue_bytes) return 0;
  frame->due = departure(link, at, frame->length, origin);
  append(&link->queue, frame);
  return 1;
}

/* How long a frame is under way that leaves at `at`: drawn anew, evenly, every ten jitters. */
static int64_t delay_ns(const Host *host, uint64_t row, uint64_t seed, int64_t since_origin) {
  if (!host->jitter_ns) return host->latency_ns;
  uint64_t bits = random_bits(seed ^ DELAYS, row, since_origin / (JITTERS_PER_DRAW * host->jitter_ns));
  return host->latency_ns + (int64_t)(((bits >> 11) * 0x1p-52 - 1) * host->jitter_ns);
}

/* Address resolution would pause for a second: on real links that lose frames, it does not travel over them. */
static int may_be_lost(const Frame *frame) { return !(frame->data[12] == 0x08 && frame->data[13] == 0x06); }

/* A frame has left its sender's uplink. */
static void launch(Port *port, uint64_t row, const Network *network, int64_t origin, Frame *frame) {
  Host *host = port->is;
  uint32_t drawn = random_bits(network->seed ^ LOSSES, row, port->launched++) >> 32;
  if (drawn < host->loss && may_be_lost(frame)) {
    host->lost++;
    free_frame(frame);
    return;
  }
  int64_t arrival = frame->due + delay_ns(host, row, network->seed, frame->due - origin);
  if (arrival < port->last_arrival) arrival = port->last_arrival;
  frame->due = port->last_arrival = arrival;
  append(&port->flight, frame);
}

/* Index of the host to whose address a frame goes, 02:00:00:00 and its number from 1; -1 for all, or for none. */
static int receiver(const Frame *frame) { return (frame->data[4] << 8 | frame->data[5]) - 1; }

static void queue_for(Port *to, Frame *frame, int64_t at, int64_t origin) {
  if (enter(&to->down, frame, at, origin)) frame->sender->forwarded++;
  else drop(frame);
}

/* A frame has left its receiver's downlink. */
static void hand_over(const Port *to, Frame *frame) {
  if (write(to->is->fd, frame->data, frame->length) < 0) {
    frame->sender->forwarded--; /* each frame counts once */
    drop(frame);
    return;
  }
  free_frame(frame);
}

/* A frame has come to the switch. */
static void arrive(Port *ports, int num_hosts, int from, Frame *frame, int64_t origin) {
  int64_t at = frame->due;
  if (!(frame->data[0] & 1)) {
    int to = receiver(frame);
    if (to >= 0 && to < num_hosts && to != from) queue_for(&ports[to], frame, at, origin);
    else free_frame(frame);
    return;
  }
  for (int to = 0; to < num_hosts; to++) {
    Frame *copy = to == from ? NULL : new_frame();
    if (!copy) continue;
    copy->sender = frame->sender;
    copy->length = frame->length;
    memcpy(copy->data, frame->data, frame->length);
    queue_for(&ports[to], copy, at, origin);
  }
  free_frame(frame);
}

/* The host whose frame comes to the switch first. */
static int earliest_in_flight(const Port *ports, int num_hosts) {
  int earliest = 0;
  for (int i = 1; i < num_hosts; i++)
    if (first_due(&ports[i].flight) < first_due(&ports[earliest].flight)) earliest = i;
  return earliest;
}

/* Everything that is due; returns when the next frame will be. */
static int64_t move_frames(Network *network, Port *ports, int64_t origin) {
  int num_hosts = network->num_hosts;
  int64_t now = monotonic_ns(), next = NEVER;
  Frame *frame;
  for (int i = 0; i < num_hosts; i++)
    while ((frame = take(&ports[i].up.queue, now))) launch(&ports[i], i, network, origin, frame);
  for (int i; (frame = take(&ports[i = earliest_in_flight(ports, num_hosts)].flight, now));)
    arrive(ports, num_hosts, i, frame, origin);
  for (int i = 0; i < num_hosts; i++) {
    while ((frame = take(&ports[i].down.queue, now))) hand_over(&ports[i], frame);
    int64_t dues[] = {first_due(&ports[i].up.queue), first_due(&ports[i].flight), first_due(&ports[i].down.queue)};
    for (int k = 0; k < 3; k++)
      if (dues[k] < next) next = dues[k];
  }
  return next;
}

static void read_frames(Port *port, int64_t origin) {
  for (int i = 0; i < READ_AT_ONCE; i++) {
    Frame *frame = new_frame();
    if (!frame) return;
    long length = read(port->is->fd, frame->data, FRAME_BYTES);
    if (length <= 0) {
      free_frame(frame);
      return;
    }
    frame->sender = port->is;
    frame->length = length;
    if (length < HEADER_BYTES) free_frame(frame);
    else if (!enter(&port->up, frame, monotonic_ns(), origin)) drop(frame);
  }
}

static int64_t begin_at(int64_t origin, Port *ports, int num_hosts) {
  for (int i = 0; i < num_hosts; i++) {
    ports[i].launched = 0;
    ports[i].up.opportunity = ports[i].down.opportunity = 0;
    ports[i].up.left = ports[i].down.left = FRAME_BYTES;
  }
  return origin;
}

/* Wake up on time, and before threads that compute. */
static void be_punctual(void) {
  /* Timers may otherwise be late by 50 us. */
  prctl(PR_SET_TIMERSLACK, 1);
  /* Who asks for short slices of time gets them sooner; kernels before 6.12 know no such wish and ignore it. */
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline, period;
  } wish = {.size = 48, .runtime_ns = SLICE_NS};
  syscall(SCHED_SETATTR, 0, &wish, 0);
}

/* Forward frames until `stop_fd` can be read. Returns 0, or -1 if there is no memory. */
int forward(Network *network) {
  int n = network->num_hosts;
  Port *ports = calloc(n, sizeof *ports);
  struct pollfd *fds = calloc(n + 1, sizeof *fds);
  if (!ports || !fds) return -1;
  be_punctual();
  for (int i = 0; i < n; i++) {
    ports[i].is = &network->hosts[i];
    ports[i].up.is = &network->hosts[i].up;
    ports[i].down.is = &network->hosts[i].down;
    fds[i] = (struct pollfd){.fd = network->hosts[i].fd, .events = POLLIN};
  }
  fds[n] = (struct pollfd){.fd = network->stop_fd, .events = POLLIN};
  int64_t origin = begin_at(network->origin_ns, ports, n);
  while (!fds[n].revents) {
    int64_t next = move_frames(network, ports, origin), wait = next == NEVER ? 3600 * NS_PER_S : next - monotonic_ns();
    if (wait < 0) wait = 0;
    int ready = ppoll(fds, n + 1, &(struct timespec){wait / NS_PER_S, wait % NS_PER_S}, NULL);
    int64_t asked = __atomic_load_n(&network->origin_ns, __ATOMIC_RELAXED);
    if (asked != origin) origin = begin_at(asked, ports, n);
    for (int i = 0; i < n && ready > 0; i++)
      if (fds[i].revents & POLLIN) read_frames(&ports[i], origin);
  }
  return 0;
}
