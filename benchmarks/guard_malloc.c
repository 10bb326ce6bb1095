/* A debug allocator for aligned memory, which is what tensors are made of; loaded by LD_PRELOAD.
 *
 * Each block lies in pages of its own, between two pages that cannot be accessed: it ends directly before one (up to
 * alignment) or begins directly behind the other. What is left of its pages, fresh and freed blocks hold a word that the
 * user chooses; it is compared when a block is freed. A pointer that malloc() made is left to the C library.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096UL
#define PAGES (1UL << 21)
#define CLASSES 17
#define FILLED (1UL << 18) /* of larger blocks only the pages at both ends hold the word */

extern void *__libc_memalign(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

struct block {
    size_t size, offset;
    uint64_t word;
    uint32_t next, live;
};

static char *region;
static size_t carved;
static struct block blocks[PAGES]; /* by first page */
static uint32_t first_page[PAGES];
static unsigned char class_of[PAGES];
static uint32_t oldest[CLASSES], newest[CLASSES]; /* freed blocks, in order: 0 for none, else page + 1 */
static char lock;

static int enabled, at_start;
static uint64_t word = 0xa5a5a5a5a5a5a5a5UL;
static size_t limit = 64UL << 20;
static uint64_t damaged, allocated;

void guard_enable(int on) { enabled = on; }
void guard_place_at_start(int on) { at_start = on; }
void guard_fill(uint64_t filler) { word = filler; }
void guard_limit(size_t size) { limit = size; }
uint64_t guard_damaged(void) { return damaged; }
uint64_t guard_allocated(void) { return allocated; }

static void take(void) { while (__atomic_test_and_set(&lock, __ATOMIC_ACQUIRE)) ; }
static void leave(void) { __atomic_clear(&lock, __ATOMIC_RELEASE); }

static void fill(char *from, char *to, const char *base, uint64_t filler)
{
    const char *bytes = (const char *)&filler;
    while (from < to && ((uintptr_t)from & 7)) {
        *from = bytes[(from - base) & 7];
        from++;
    }
    for (; from + 8 <= to; from += 8)
        *(uint64_t *)from = filler; /* pages are aligned, so is the word */
    for (; from < to; from++)
        *from = bytes[(from - base) & 7];
}

static int holds(const char *from, const char *to, const char *base, uint64_t filler)
{
    const char *bytes = (const char *)&filler;
    for (; from < to && ((uintptr_t)from & 7); from++)
        if (*from != bytes[(from - base) & 7])
            return 0;
    for (; from + 8 <= to; from += 8)
        if (*(const uint64_t *)from != filler)
            return 0;
    for (; from < to; from++)
        if (*from != bytes[(from - base) & 7])
            return 0;
    return 1;
}

static void fill_pages(char *start, size_t length, uint64_t filler)
{
    if (length <= 2 * FILLED) {
        fill(start, start + length, start, filler);
    } else {
        fill(start, start + FILLED, start, filler);
        fill(start + length - FILLED, start + length, start, filler);
    }
}

static int carve(int class)
{
    size_t pages = 1UL << class;
    if (!region) {
        region = mmap(NULL, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (region == MAP_FAILED) {
            region = NULL;
            return -1;
        }
        carved = 1;
    }
    if (carved + pages + 1 > PAGES || mprotect(region + carved * PAGE, pages * PAGE, PROT_READ | PROT_WRITE))
        return -1;
    for (size_t page = carved; page < carved + pages; page++) {
        first_page[page] = carved;
        class_of[page] = class + 1;
    }
    carved += pages + 1;
    return carved - pages - 1;
}

static void *guarded(size_t alignment, size_t size)
{
    size_t rounded = (size + alignment - 1) / alignment * alignment;
    int class = 0;
    while ((PAGE << class) < rounded)
        class++;
    if (class >= CLASSES)
        return NULL;
    int page;
    if (oldest[class]) {
        page = oldest[class] - 1;
        oldest[class] = blocks[page].next;
        if (!oldest[class])
            newest[class] = 0;
    } else {
        page = carve(class);
        if (page < 0)
            return NULL;
    }
    char *start = region + page * PAGE;
    size_t length = PAGE << class;
    blocks[page] = (struct block){size, at_start ? 0 : length - rounded, word, 0, 1};
    fill_pages(start, length, word);
    allocated++;
    return start + blocks[page].offset;
}

static int ours(const void *pointer)
{
    return region && (const char *)pointer >= region && (const char *)pointer < region + PAGES * PAGE;
}

static void release(char *pointer)
{
    size_t page = first_page[(pointer - region) / PAGE];
    struct block *block = &blocks[page];
    char *start = region + page * PAGE;
    int class = class_of[page] - 1;
    size_t length = PAGE << class;
    if (class < 0 || !block->live || pointer != start + block->offset)
        abort(); /* freed twice, or never allocated */
    if (length <= 2 * FILLED && (!holds(start, pointer, start, block->word) ||
                                 !holds(pointer + block->size, start + length, start, block->word)))
        damaged++;
    block->live = 0;
    if (length > 2 * FILLED)
        madvise(start, length, MADV_DONTNEED);
    else
        fill_pages(start, length, word);
    block->next = 0;
    if (newest[class])
        blocks[newest[class] - 1].next = page + 1;
    else
        oldest[class] = page + 1;
    newest[class] = page + 1;
}

int posix_memalign(void **pointer, size_t alignment, size_t size)
{
    void *made = NULL;
    if (enabled && size > 0 && alignment <= PAGE) {
        if (size <= limit) {
            take();
            made = guarded(alignment, size);
            leave();
        }
    } else {
        made = __libc_memalign(alignment, size);
    }
    if (!made)
        return ENOMEM;
    *pointer = made;
    return 0;
}

void *memalign(size_t alignment, size_t size)
{
    void *made;
    int status = posix_memalign(&made, alignment, size);
    if (status)
        errno = status;
    return status ? NULL : made;
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void free(void *pointer)
{
    if (!ours(pointer)) {
        __libc_free(pointer);
        return;
    }
    take();
    release(pointer);
    leave();
}

void *realloc(void *pointer, size_t size)
{
    if (!ours(pointer))
        return __libc_realloc(pointer, size);
    size_t page = first_page[((char *)pointer - region) / PAGE], before = blocks[page].size;
    void *made = malloc(size);
    if (made) {
        memcpy(made, pointer, before < size ? before : size);
        free(pointer);
    }
    return made;
}
