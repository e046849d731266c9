/* A device's memory: addresses that nobody else has, how many of its bytes are taken, and what they hold.
 *
 * Each device has a span of host addresses. To take memory is to take the lowest free place in it and to count; a page
 * stands behind an address from the first write on. Kernels write nothing, so most pages never do. A copy of up to a
 * mebibyte moves its bytes, a larger one only with numbers (phantom_numbers): the memory of a 7B model stays untouched.
 */
#define _GNU_SOURCE
#include "declarations.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define MOST_DEVICES 64
#define FIRST 0x100000000000UL  /* 16 TiB: below what the kernel hands out by itself */
#define SPAN ((size_t)1 << 40)  /* bytes of a device's addresses, at least */
#define MOST ((size_t)32 << 40) /* of all devices together */
#define PAGE ((size_t)4096)
#define NOBODYS (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)

struct device phantom_devices[MOST_DEVICES];
int phantom_count, phantom_major = 9, phantom_minor, phantom_processors = 132;
const char *phantom_name = "Phantom";
static size_t span;
static int numbers;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t number(const char *name, size_t otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtoull(text, NULL, 10) : otherwise;
}

static void start(void)
{
    int count = (int)number("REFIMPL_PHANTOM_DEVICES", 1);
    size_t total = number("REFIMPL_PHANTOM_MEMORY", 0), context = number("REFIMPL_PHANTOM_CONTEXT", 0);
    phantom_major = (int)number("REFIMPL_PHANTOM_MAJOR", 9);
    phantom_minor = (int)number("REFIMPL_PHANTOM_MINOR", 0);
    phantom_processors = (int)number("REFIMPL_PHANTOM_PROCESSORS", 132);
    if (getenv("REFIMPL_PHANTOM_NAME")) phantom_name = getenv("REFIMPL_PHANTOM_NAME");
    /* Each pool's expandable segment reserves 9/8 of the memory, and each captured graph has pools. */
    for (span = SPAN; span < 64 * total && span * count < MOST; span *= 2);
    for (int i = 0; i < count && i < MOST_DEVICES; i++) {
        struct device *d = phantom_devices + i;
        void *base = (void *)(FIRST + i * span);
        if (mmap(base, span, PROT_NONE, NOBODYS | MAP_FIXED_NOREPLACE, -1, 0) != base) {
            perror("phantom: no addresses for a device");
            return;
        }
        *d = (struct device){.base = (uintptr_t)base, .total = total, .used = context};
        phantom_count++;
    }
}

void phantom_start(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, start);
}

/* Copies of any size move their bytes from now on, or no longer. */
API void phantom_numbers(int on) { numbers = on; }

/* Who is asked about each copy from a device to the host, by which a program reads numbers: 0 has it go on. */
static int (*asked)(void);
API void phantom_ask_at_reads(int (*function)(void)) { asked = function; }

int phantom_device_of(const void *address)
{
    uintptr_t at = (uintptr_t)address;
    return at < FIRST || at >= FIRST + phantom_count * span ? -1 : (int)((at - FIRST) / span);
}

/* ---- places, in the order of addresses ---- */

/* The number of ranges that begin below an address. */
static size_t below(struct device *d, uintptr_t address)
{
    size_t low = 0, high = d->count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (d->ranges[middle].address < address) low = middle + 1; else high = middle;
    }
    return low;
}

/* Take the lowest free place; 0 if there is none. */
static uintptr_t place(struct device *d, size_t size, size_t alignment, int backed)
{
    uintptr_t at = d->base;
    size_t i = 0;
    for (; i < d->count; i++) {
        at = (at + alignment - 1) / alignment * alignment;
        if (at + size <= d->ranges[i].address) break;
        at = d->ranges[i].address + d->ranges[i].size;
    }
    at = (at + alignment - 1) / alignment * alignment;
    if (at + size > d->base + span) return 0;
    if (d->count == d->room) {
        size_t room = d->room * 2 + 64;
        struct range *more = realloc(d->ranges, room * sizeof *more);
        if (!more) return 0;
        d->ranges = more, d->room = room;
    }
    memmove(d->ranges + i + 1, d->ranges + i, (d->count++ - i) * sizeof *d->ranges);
    d->ranges[i] = (struct range){at, size, backed};
    return at;
}

static int fits(struct device *d, size_t size)
{
    if (size > d->total || d->used > d->total - size) return 0;
    d->used += size;
    return 1;
}

/* Memory as cudaMalloc gives it, in the driver's units of 2 MiB, or of a page if it is small. NULL: out of memory. */
void *phantom_allocate(struct device *d, size_t size)
{
    size_t unit = size >= MIB ? 2 * MIB : PAGE;
    uintptr_t at = 0;
    if (size > d->total) return NULL;
    size = (size + unit - 1) / unit * unit;
    pthread_mutex_lock(&lock);
    if (fits(d, size)) {
        at = place(d, size, unit, 1);
        if (at && !phantom_back((void *)at, size)) d->used -= size, at = 0;
    }
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

/* Give back memory, or addresses alone. 0 if nothing begins here. */
int phantom_free(void *address)
{
    int i = phantom_device_of(address), found = 0;
    if (i < 0) return 0;
    struct device *d = phantom_devices + i;
    pthread_mutex_lock(&lock);
    size_t at = below(d, (uintptr_t)address);
    if (at < d->count && d->ranges[at].address == (uintptr_t)address) {
        if (d->ranges[at].backed) d->used -= d->ranges[at].size;
        phantom_unback(address, d->ranges[at].size);
        d->count--;
        memmove(d->ranges + at, d->ranges + at + 1, (d->count - at) * sizeof *d->ranges);
        found = 1;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Addresses without memory, for the driver's virtual memory. */
void *phantom_reserve(struct device *d, size_t size, size_t alignment)
{
    pthread_mutex_lock(&lock);
    uintptr_t at = place(d, size, alignment > 2 * MIB ? alignment : 2 * MIB, 0);
    pthread_mutex_unlock(&lock);
    return (void *)at;
}

/* Memory without addresses. 0: out of memory. */
int phantom_hold(struct device *d, size_t size)
{
    pthread_mutex_lock(&lock);
    int held = fits(d, size);
    pthread_mutex_unlock(&lock);
    return held;
}

void phantom_release(struct device *d, size_t size)
{
    pthread_mutex_lock(&lock);
    d->used -= size;
    pthread_mutex_unlock(&lock);
}

/* The range that an address is in; of size 0 if none. */
struct range phantom_range(const void *address)
{
    struct range answer = {0, 0, 0};
    int i = phantom_device_of(address);
    if (i < 0) return answer;
    struct device *d = phantom_devices + i;
    pthread_mutex_lock(&lock);
    size_t at = below(d, (uintptr_t)address + 1);
    if (at && (uintptr_t)address < d->ranges[at - 1].address + d->ranges[at - 1].size) answer = d->ranges[at - 1];
    pthread_mutex_unlock(&lock);
    return answer;
}

/* ---- what it holds ---- */

int phantom_back(void *at, size_t size)
{
    madvise(at, size, MADV_NOHUGEPAGE);
    return !mprotect(at, size, PROT_READ | PROT_WRITE);
}

void phantom_unback(void *at, size_t size)
{
    mmap(at, size, PROT_NONE, NOBODYS | MAP_FIXED, -1, 0);
}

int phantom_copy(void *to, const void *from, size_t size)
{
    if (to && to != from && (numbers || size <= MIB)) memmove(to, from, size);
    return asked && phantom_device_of(from) >= 0 && phantom_device_of(to) < 0 && asked() ? NO_NUMBERS : SUCCESS;
}

/* Zeros over many pages give the pages back, which then read as zeros. */
void phantom_set(void *at, int value, size_t size)
{
    uintptr_t first = ((uintptr_t)at + PAGE - 1) & ~(PAGE - 1), last = ((uintptr_t)at + size) & ~(PAGE - 1);
    if (size <= MIB || phantom_device_of(at) < 0 || (numbers && (value & 255))) {
        memset(at, value, size);
    } else if (!(value & 255)) {
        memset(at, 0, first - (uintptr_t)at);
        madvise((void *)first, last - first, MADV_DONTNEED);
        memset((void *)last, 0, (uintptr_t)at + size - last);
    }
}
