/* Stands in for libdcgm: the few functions and structures of DCGM's public headers that are
 * used, written afresh, and behaviours a test asks for by the words in the file that
 * STAND_IN_DCGM names, read at each call. INCIDENTS is 1024 for DCGM 4, 64 for DCGM 2 and 3.
 */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef INCIDENTS
#define INCIDENTS 1024
#endif
#define VERSION (INCIDENTS == 1024 ? 5u : 4u)

struct incident {
    unsigned system, health;
    char message[1024];
    unsigned code;
    unsigned group, entity;
};

struct response {
    unsigned version, overall, count;
    struct incident incidents[INCIDENTS];
};

static const uintptr_t HANDLE = 0x7fffffff12345678u;
static int initialised, watched, checks;
static char connected[100];

static int asked_for(const char *word) {
    char text[200] = "";
    const char *path = getenv("STAND_IN_DCGM");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file) {
        size_t n = fread(text, 1, sizeof text - 1, file);
        text[n] = 0;
        fclose(file);
    }
    return strstr(text, word) != NULL;
}

const char *errorString(int code) { return code == -21 ? "Host engine connection invalid" : NULL; }

int dcgmInit(void) {
    puts("a library that talks on stdout");
    fflush(stdout);
    initialised = 1;
    return asked_for("init-fails") ? -3 : 0;
}

int dcgmStartEmbedded(unsigned mode, uintptr_t *handle) {
    if (!initialised || mode != 1) return -1;
    if (asked_for("slow-start")) sleep(2);
    strcpy(connected, "embedded");
    *handle = HANDLE;
    return 0;
}

int dcgmConnect(const char *address, uintptr_t *handle) {
    if (!initialised || asked_for("refuse")) return -21;
    snprintf(connected, sizeof connected, "%s", address);
    *handle = HANDLE;
    return 0;
}

int dcgmHealthSet(uintptr_t handle, uintptr_t group, unsigned systems) {
    if (handle != HANDLE || group != 0x7fffffff || systems != 0xFFFFFFFFu) return -1;
    watched = 1;
    return 0;
}

int dcgmHealthCheck(uintptr_t handle, uintptr_t group, struct response *out) {
    if (handle != HANDLE || group != 0x7fffffff || !watched) return -1;
    if (out->version != ((unsigned)sizeof(struct response) | VERSION << 24)) return -12;
    if (asked_for("crash")) raise(SIGSEGV);
    if (asked_for("hang")) sleep(600);
    if (asked_for("lost")) return -21;
    checks++;
    out->overall = asked_for("odd-overall") ? 15 : asked_for("fail") ? 20 : 0;
    out->count = asked_for("too-many") ? INCIDENTS + 1 : asked_for("fail") ? 2 : 0;
    if (asked_for("full")) out->count = INCIDENTS;
    for (unsigned i = 0; i < out->count && i < INCIDENTS; i++) {
        struct incident *one = &out->incidents[i];
        one->system = 0x10;
        one->health = asked_for("odd-incident") ? 7 : i ? 10 : 20;
        snprintf(one->message, sizeof one->message, "check %d of %s \xff\"%u", checks, connected, i);
        one->code = 4294967295u;
        one->group = 1;
        one->entity = i;
    }
    return 0;
}
