"""The Lua scripts of the live store, and the keys that they share with `redis`.

Each script judges by the server's own `TIME` (B152) and changes all or nothing (B145). They take
every key below one hash tag, so that keys they build themselves lie in the same slot.

Keys below `readyplane:{registry}:` (names hold no `|`), times in whole milliseconds of the server:

    src|ID       hash   json, incarnation, digest, tier, places, first, expires, mean, best, samples
    held|DIGEST  zset   source ids by expiry
    all          zset   source ids by expiry
    old|ID|LIFE  text   an earlier life of a source
    read|ID      zset   transfer ids by expiry
    places       zset   transfer ids by expiry, of all sources
    tran|ID      hash   a reader's place, kept for its report after it has ended
    req|…        text   transfer id of a request that may come again
    bar|ID       hash   reason, until, times
    bars         list   the latest bars as JSON, newest first
    up|WORKER|LIFE zset TRANSFER|SOURCE by expiry: from whom a worker reads
    acc|…        zset   sources that a reader has called corrupt, by the end of that memory
    tiers        hash   TIER:mean, TIER:best, TIER:samples
"""

NOW = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
"""
# KEYS src held all old(this) read; ARGV json incarnation digest tier places ttl shown earlier
#   old-key-prefix held-key-prefix id worker partial draining layout
ANNOUNCE = (
    NOW
    + """
local was = redis.call('HMGET', KEYS[1], 'incarnation', 'digest')
if redis.call('EXISTS', KEYS[4]) == 1 then return {'earlier', was[1] or ''} end
if was[1] and was[1] ~= ARGV[2] then
  redis.call('SET', ARGV[9] .. was[1], '1', 'PX', ARGV[8])
end
if was[1] ~= ARGV[2] or was[2] ~= ARGV[3] then
  if was[2] then redis.call('ZREM', ARGV[10] .. was[2], ARGV[11]) end
  redis.call('DEL', KEYS[1], KEYS[5])
  redis.call('HSET', KEYS[1], 'first', now)
end
local expires = now + tonumber(ARGV[6])
local keep = tonumber(ARGV[6]) + tonumber(ARGV[7])
redis.call('HSET', KEYS[1], 'json', ARGV[1], 'incarnation', ARGV[2], 'digest', ARGV[3],
  'tier', ARGV[4], 'places', ARGV[5], 'expires', expires, 'worker', ARGV[12],
  'partial', ARGV[13], 'draining', ARGV[14], 'layout', ARGV[15])
redis.call('PEXPIRE', KEYS[1], keep)
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  redis.call('ZADD', key, expires, ARGV[11])
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - tonumber(ARGV[7]))
  redis.call('PEXPIRE', key, keep)
end
return {'ok'}
"""
)
# KEYS src all read; ARGV id held-key-prefix
WITHDRAW = """
local digest = redis.call('HGET', KEYS[1], 'digest')
redis.call('DEL', KEYS[3])
if not digest then return 0 end
redis.call('ZREM', ARGV[2] .. digest, ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('DEL', KEYS[1])
return 1
"""
# KEYS src read bar req tran(new) places up(reader); ARGV digest transfer-id ttl window own-places tier
#   source-id worker incarnation tran-key-prefix expected-life layout seen src-key-prefix
#   up-key-prefix chain-max
ACQUIRE = (
    NOW
    + """
local incarnation, tier, places, partial, json = '', ARGV[6], ARGV[5], '0', ''
local draining = '0'
if places == '' then
  local src = redis.call('HMGET', KEYS[1], 'expires', 'digest', 'incarnation', 'tier', 'places',
    'partial', 'draining', 'layout', 'json')
  if not src[1] or tonumber(src[1]) <= now then return {'gone'} end
  if src[2] ~= ARGV[1] then return {'other', src[2]} end
  incarnation, tier, places, json = src[3], src[4], src[5], src[9]
  partial, draining = src[6] or '0', src[7] or '0'
  if ARGV[11] ~= '' and ARGV[11] ~= incarnation then return {'life', incarnation} end
  if ARGV[12] ~= (src[8] or '') then return {'layout', src[8] or ''} end
end
local bar = redis.call('HMGET', KEYS[3], 'reason', 'until')
if bar[2] and tonumber(bar[2]) > now then return {'barred', bar[1], tonumber(bar[2]) - now} end
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
local ttl, window = tonumber(ARGV[3]), tonumber(ARGV[4])
local mine = redis.call('GET', KEYS[4])
local id = ARGV[2]
local readers = redis.call('ZCARD', KEYS[2])

-- Does the source read, directly or behind others, from this reader?
local function circle()
  local seen, count, ahead = {}, 0, {ARGV[7]}
  while #ahead > 0 and count < tonumber(ARGV[16]) do
    local name = table.remove(ahead)
    local src = redis.call('HMGET', ARGV[14] .. name, 'worker', 'incarnation')
    if src[1] and not seen[name] then
      seen[name] = true
      count = count + 1
      if src[1] == ARGV[8] and src[2] == ARGV[9] then return true end
      if src[1] ~= '' then
        local up = redis.call('ZRANGEBYSCORE', ARGV[15] .. src[1] .. '|' .. src[2],
          '(' .. now, '+inf')
        for _, pair in ipairs(up) do
          table.insert(ahead, string.sub(pair, string.find(pair, '|', 1, true) + 1))
        end
      end
    end
  end
  return false
end

if mine and redis.call('ZSCORE', KEYS[2], mine) then
  id = mine
else
  if draining == '1' then return {'leaves'} end
  if readers >= tonumber(places) then
    local first = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')
    return {'full', readers, (tonumber(first[2]) or now) - now}
  end
  if ARGV[13] ~= '' and readers > tonumber(ARGV[13]) then return {'busier', readers} end
  if partial == '1' and circle() then return {'circle'} end
  readers = readers + 1
  redis.call('HSET', KEYS[5], 'source', ARGV[7], 'life', incarnation, 'digest', ARGV[1],
    'tier', tier, 'worker', ARGV[8], 'incarnation', ARGV[9], 'before', readers,
    'request', KEYS[4], 'partial', partial)
end
redis.call('ZADD', KEYS[2], now + ttl, id)
redis.call('PEXPIRE', KEYS[2], ttl)
for _, pair in ipairs({{KEYS[6], id}, {KEYS[7], id .. '|' .. ARGV[7]}}) do
  redis.call('ZREMRANGEBYSCORE', pair[1], '-inf', now)
  redis.call('ZADD', pair[1], now + ttl, pair[2])
  redis.call('PEXPIRE', pair[1], ttl)
end
redis.call('SET', KEYS[4], id, 'PX', ttl)
redis.call('PEXPIRE', ARGV[10] .. id, ttl + window)
return {'ok', id, readers, json}
"""
)
# KEYS tran src read bar acc tiers places up(reader) bars; ARGV transfer-id rate weight bar reason
#   accuse memory window source-id told remembered doublings shown
RELEASE = (
    NOW
    + """
local was = redis.call('HMGET', KEYS[1], 'source', 'life', 'tier', 'released', 'barred', 'request')
if not was[1] then return {'unknown'} end
if was[4] then return {'again', was[5] or '0'} end
local expires = redis.call('ZSCORE', KEYS[3], ARGV[1])
local held = (expires and tonumber(expires) > now) and 1 or 0
redis.call('ZREM', KEYS[3], ARGV[1])
redis.call('ZREM', KEYS[7], ARGV[1])
redis.call('ZREM', KEYS[8], ARGV[1] .. '|' .. ARGV[9])
redis.call('DEL', was[6])
local life = redis.call('HGET', KEYS[2], 'incarnation')
local same = life and life == was[2]
local function learn(key, prefix, rate)
  local k = redis.call('HMGET', key, prefix .. 'mean', prefix .. 'best', prefix .. 'samples')
  local mean, best, samples = rate, rate, 1
  if k[3] then
    mean = tonumber(k[1]) + tonumber(ARGV[3]) * (rate - tonumber(k[1]))
    best = math.max(tonumber(k[2]), rate)
    samples = tonumber(k[3]) + 1
  end
  redis.call('HSET', key, prefix .. 'mean', string.format('%.17g', mean),
    prefix .. 'best', string.format('%.17g', best), prefix .. 'samples', samples)
end
if ARGV[2] ~= '' then
  local rate = tonumber(ARGV[2])
  learn(KEYS[6], was[3] .. ':', rate)
  if same then learn(KEYS[2], '', rate) end
end
if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[5], now + tonumber(ARGV[7]), ARGV[9])
  redis.call('PEXPIRE', KEYS[5], ARGV[7])
end
local barred = '0'
if tonumber(ARGV[4]) > 0 and same then
  local times = redis.call('HINCRBY', KEYS[4], 'times', 1)
  local bar = tonumber(ARGV[4]) * 2 ^ math.min(times - 1, tonumber(ARGV[12]))
  local until_ms = now + bar
  local held_until = redis.call('HGET', KEYS[4], 'until')
  if not held_until or tonumber(held_until) < until_ms then
    redis.call('HSET', KEYS[4], 'reason', ARGV[5], 'until', string.format('%.0f', until_ms))
  end
  redis.call('PEXPIRE', KEYS[4], string.format('%.0f', bar + tonumber(ARGV[11])))
  redis.call('LPUSH', KEYS[9], string.format('%.0f %.0f ', now, bar) .. ARGV[10])
  redis.call('LTRIM', KEYS[9], 0, tonumber(ARGV[13]) - 1)
  redis.call('PEXPIRE', KEYS[9], 24 * 3600 * 1000)
  barred = '1'
end
redis.call('HSET', KEYS[1], 'released', '1', 'barred', barred)
redis.call('PEXPIRE', KEYS[1], ARGV[8])
return {'ok', barred, held}
"""
)
