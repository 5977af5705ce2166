/* The forwarder: a switch between the interfaces of virtual hosts, which delays every frame as its links would.

   A frame waits for its sender's uplink, may be lost, is delayed, and waits for its receiver's downlink. Frames keep
   their order in each of these stages. The times of a stage are computed from those of the stage before, not from when
   this thread woke up, so late wake-ups do not add up. There is only one thread.

   Sources: Netravali et al. 2015 (Mahimahi, USENIX ATC), a link by its trace; Steele, Lea, Flood 2014 (fast splittable
   pseudorandom number generators, OOPSLA); Linux, sched_setattr(2), ppoll(2). */

#include <stddef.h>
#include <stdint.h>

/* Declarations of the C library's functions, as on 64-bit Linux: no headers are needed to compile this file. */
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
  HEADER_BYTES = 14,   /* destination, source, type */
  FRAME_BYTES = 1514,  /* the largest frame; also the bytes that one delivery opportunity of a trace carries */
  SLICE_NS = 100000,
  READ_AT_ONCE = 64,   /* frames that are read from one host before the next one */
  JITTERS_PER_DRAW = 10
};
#ifndef SOURCES
#define SOURCES ""
#endif
/* Returns the digest of the sources that this library was compiled from. */
const char *sources_digest(void) { return SOURCES; }

static const int64_t NS_PER_MS = 1000000, NS_PER_S = 1000000000, NEVER = INT64_MAX;
static const uint64_t LOSSES = 0x6c6f7373, DELAYS = 0x64656c61; /* mixed into the seed, so that the numbers differ */

/* One direction of a host's link: a rate, a trace, or neither. Filled in by `bench.hosts.forwarder.forwarder`. */
typedef struct {
  double bytes_per_ns;    /* 0: no limit */
  const uint32_t *trace;  /* milliseconds of the delivery opportunities, ascending; the last is the period, above 0 */
  int64_t trace_length;   /* 0: no trace */
  int64_t queue_bytes;    /* capacity of the queue */
} Direction;

/* A host. `bench.hosts.forwarder.forwarder` fills it in, except for the three counters, which are incremented here. */
typedef struct {
  int32_t fd; /* non-blocking; reads and writes one frame at a time */
  uint32_t loss; /* of 2^32 frames, this many are lost */
  Direction up, down;
  int64_t latency_ns, jitter_ns;
  /* frames that this host sent: delivered; lost at random; dropped by a full queue or by the receiver */
  uint64_t forwarded, lost, dropped;
} Host;

typedef struct {
  Host *hosts;
  int32_t num_hosts;
  int32_t stop_fd; /* the forwarder ends when this is readable */
  uint64_t seed;
  int64_t origin_ns; /* start of traces and random numbers, by the monotonic clock; another thread may change it */
} Network;

typedef struct Frame {
  struct Frame *next;
  Host *sender;
  int64_t due; /* time at which it leaves its stage, ns */
  int32_t length;
  unsigned char data[FRAME_BYTES];
} Frame;

typedef struct {
  Frame *first, *last;
  int64_t bytes;
} Queue;

/* The state of a direction. */
typedef struct {
  const Direction *direction;
  Queue queue;
  double free_at;      /* rate: time at which the last bit of the last frame has left, ns */
  int64_t opportunity; /* trace: index of the next opportunity, counted from the origin */
  int64_t left;        /* trace: bytes that this opportunity can still carry */
} Link;

typedef struct {
  Host *host;
  Link up, down;
  Queue flight; /* between the two links */
  int64_t last_arrival;
  uint64_t launched; /* frames that have left the uplink since the origin */
} Port;

static Frame *spare; /* frames that are free for reuse */

static int64_t monotonic_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * NS_PER_S + t.tv_nsec;
}

/* Returns 64 random bits, which depend only on the arguments. */
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

/* Removes and returns the first frame, or returns NULL if it is not due by `now`. */
static Frame *take(Queue *queue, int64_t now) {
  Frame *frame = queue->first;
  if (!frame || frame->due > now) return NULL;
  queue->first = frame->next;
  queue->bytes -= frame->length;
  return frame;
}

static int64_t first_due(const Queue *queue) { return queue->first ? queue->first->due : NEVER; }

static int64_t opportunity_ns(const Direction *direction, int64_t index) {
  int64_t period_ms = direction->trace[direction->trace_length - 1];
  return (index / direction->trace_length * period_ms + direction->trace[index % direction->trace_length]) * NS_PER_MS;
}

/* Returns the index of the first opportunity at or after `ns`; both count from the origin. */
static int64_t opportunity_from(const Direction *direction, int64_t ns) {
  if (ns <= 0) return 0;
  int64_t period_ns = direction->trace[direction->trace_length - 1] * NS_PER_MS;
  int64_t low = 0, high = direction->trace_length;
  int64_t round = (ns - 1) / period_ns; /* the end of a period belongs to it */
  while (low < high) {
    int64_t middle = (low + high) / 2, index = round * direction->trace_length + middle;
    if (opportunity_ns(direction, index) < ns) low = middle + 1;
    else high = middle;
  }
  return round * direction->trace_length + low;
}

/* Returns the time at which the last bit of a frame leaves that arrives at `at`, behind all earlier frames. */
static int64_t departure(Link *link, int64_t at, int64_t length, int64_t origin) {
  const Direction *direction = link->direction;
  if (direction->trace_length) {
    if (opportunity_ns(direction, link->opportunity) < at - origin) { /* skip those before, which are unused */
      link->opportunity = opportunity_from(direction, at - origin);
      link->left = FRAME_BYTES;
    }
    for (; length > link->left; link->left = FRAME_BYTES) {
      length -= link->left;
      link->opportunity++;
    }
    link->left -= length;
    return origin + opportunity_ns(direction, link->opportunity);
  }
  if (direction->bytes_per_ns == 0) return at;
  if (link->free_at < at) link->free_at = at;
  link->free_at += length / direction->bytes_per_ns;
  return link->free_at;
}

/* For tests: computes when frames of these lengths, which arrive at these times, leave a direction with a queue of
   unlimited length. */
void departures(const Direction *direction, int64_t number, const int64_t *at, const int64_t *length, int64_t *left) {
  Link link = {.direction = direction, .left = FRAME_BYTES};
  for (int64_t i = 0; i < number; i++) left[i] = departure(&link, at[i], length[i], 0);
}

/* Queues a frame for a link. Returns 0 if the queue is full. */
static int enter(Link *link, Frame *frame, int64_t at, int64_t origin) {
  if (link->queue.bytes + frame->length > link->direction->queue_bytes) return 0;
  frame->due = departure(link, at, frame->length, origin);
  append(&link->queue, frame);
  return 1;
}

/* Returns the delay between the links: uniform within latency +- jitter, drawn again after ten times the jitter. */
static int64_t delay_ns(const Host *host, uint64_t row, uint64_t seed, int64_t since_origin) {
  if (!host->jitter_ns) return host->latency_ns;
  uint64_t bits = random_bits(seed ^ DELAYS, row, since_origin / (JITTERS_PER_DRAW * host->jitter_ns));
  return host->latency_ns + (int64_t)(((bits >> 11) * 0x1p-52 - 1) * host->jitter_ns);
}

/* ARP is never lost, because it would retry only after a second; on a real lossy link, it is not sent over the link. */
static int may_be_lost(const Frame *frame) { return !(frame->data[12] == 0x08 && frame->data[13] == 0x06); }

/* Handles a frame that has left its sender's uplink. */
static void launch(Port *port, uint64_t row, const Network *network, int64_t origin, Frame *frame) {
  Host *host = port->host;
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

/* Returns the index of the receiving host, whose address is 02:00:00:00 and its number from 1; -1 for no host. */
static int receiver(const Frame *frame) { return (frame->data[4] << 8 | frame->data[5]) - 1; }

static void queue_for(Port *to, Frame *frame, int64_t at, int64_t origin) {
  if (enter(&to->down, frame, at, origin)) frame->sender->forwarded++;
  else drop(frame);
}

/* Handles a frame that has left its receiver's downlink. */
static void hand_over(const Port *to, Frame *frame) {
  if (write(to->host->fd, frame->data, frame->length) < 0) {
    frame->sender->forwarded--; /* each frame is counted once */
    drop(frame);
    return;
  }
  free_frame(frame);
}

/* Handles a frame that has arrived at the switch: queues it for its receiver, or copies of it for all. */
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

/* Returns the host whose frame arrives at the switch first. */
static int earliest_in_flight(const Port *ports, int num_hosts) {
  int earliest = 0;
  for (int i = 1; i < num_hosts; i++)
    if (first_due(&ports[i].flight) < first_due(&ports[earliest].flight)) earliest = i;
  return earliest;
}

/* Moves all frames that are due, and returns the time at which the next one is due. */
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
    long length = read(port->host->fd, frame->data, FRAME_BYTES);
    if (length <= 0) {
      free_frame(frame);
      return;
    }
    frame->sender = port->host;
    frame->length = length;
    if (length < HEADER_BYTES) free_frame(frame);
    else if (!enter(&port->up, frame, monotonic_ns(), origin)) drop(frame);
  }
}

static int64_t restart_at(int64_t origin, Port *ports, int num_hosts) {
  for (int i = 0; i < num_hosts; i++) {
    ports[i].launched = 0;
    ports[i].up.opportunity = ports[i].down.opportunity = 0;
    ports[i].up.left = ports[i].down.left = FRAME_BYTES;
  }
  return origin;
}

/* Makes this thread wake up on time, and before threads that compute. */
static void reduce_wakeup_latency(void) {
  /* by default, timers may be late by 50 us */
  prctl(PR_SET_TIMERSLACK, 1);
  /* the scheduler runs threads with shorter time slices sooner; kernels before 6.12 ignore the attribute */
  struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime_ns, deadline, period;
  } attributes = {.size = 48, .runtime_ns = SLICE_NS};
  syscall(SCHED_SETATTR, 0, &attributes, 0);
}

/* Forwards frames until `stop_fd` is readable. Returns 0, or -1 if memory cannot be allocated. */
int forward(Network *network) {
  int n = network->num_hosts;
  Port *ports = calloc(n, sizeof *ports);
  struct pollfd *fds = calloc(n + 1, sizeof *fds);
  if (!ports || !fds) return -1;
  reduce_wakeup_latency();
  for (int i = 0; i < n; i++) {
    ports[i].host = &network->hosts[i];
    ports[i].up.direction = &network->hosts[i].up;
    ports[i].down.direction = &network->hosts[i].down;
    fds[i] = (struct pollfd){.fd = network->hosts[i].fd, .events = POLLIN};
  }
  fds[n] = (struct pollfd){.fd = network->stop_fd, .events = POLLIN};
  int64_t origin = restart_at(network->origin_ns, ports, n);
  while (!fds[n].revents) {
    int64_t next = move_frames(network, ports, origin), wait = next == NEVER ? 3600 * NS_PER_S : next - monotonic_ns();
    if (wait < 0) wait = 0;
    int ready = ppoll(fds, n + 1, &(struct timespec){wait / NS_PER_S, wait % NS_PER_S}, NULL);
    int64_t new_origin = __atomic_load_n(&network->origin_ns, __ATOMIC_RELAXED);
    if (new_origin != origin) origin = restart_at(new_origin, ports, n);
    for (int i = 0; i < n && ready > 0; i++)
      if (fds[i].revents & POLLIN) read_frames(&ports[i], origin);
  }
  return 0;
}
