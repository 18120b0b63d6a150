-- sample_claim: give a worker waiting sample requests, one of each tenant in turn.
-- Fenced by the worker's epoch. What only this worker can run comes first, then what any can, then
-- what waits for a worker that is gone and yet needs nothing of it: its weights are stored.
-- The same token once more is a claim whose answer was lost: it gets that answer.
local epoch_key, ring, claimed, workers, last_claim = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local epoch, prefix, me, any_lane, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local token = ARGV[6]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end

local function rows_of(requests)
  local rows = {}
  for i, request in ipairs(requests) do
    rows[i] = redis.call('HMGET', 'cotrain:sample:' .. request,
      'tenant', 'sampler', 'weights', 'ref', 'body', 'at', 'starts', 'deaths')
    table.insert(rows[i], 1, request)
  end
  return rows
end

local before = redis.call('LRANGE', last_claim, 0, -1)
if table.remove(before, 1) == token then
  return rows_of(before)
end

local gone = {}
for _, worker in ipairs(redis.call('SMEMBERS', workers)) do
  if worker ~= me and redis.call('EXISTS', prefix .. 'worker:' .. worker) == 0 then
    gone[#gone + 1] = worker
  end
end

local function next_of(tenant)
  for _, lane in ipairs({ me, any_lane }) do
    local request = redis.call('LPOP', prefix .. 'waiting:' .. lane .. ':' .. tenant)
    if request then
      return request
    end
  end
  for _, lane in ipairs(gone) do
    local waiting = prefix .. 'waiting:' .. lane .. ':' .. tenant
    local request = redis.call('LINDEX', waiting, 0)
    local weights = request and redis.call('HGET', 'cotrain:sample:' .. request, 'weights')
    if request and redis.call('HGET', 'cotrain:weights:' .. weights, 'digest') ~= '' then
      return redis.call('LPOP', waiting)
    end
  end
end

local function claim_next()
  for _, tenant in ipairs(redis.call('LRANGE', ring, 0, -1)) do
    local request = next_of(tenant)
    if request then
      local load = prefix .. 'samples:' .. tenant
      redis.call('LREM', ring, 1, tenant)
      if redis.call('HINCRBY', load, 'waiting', -1) > 0 then
        redis.call('RPUSH', ring, tenant) -- who was served stands last; who was passed over keeps its turn
      end
      redis.call('HINCRBY', load, 'running', 1)
      redis.call('RPUSH', claimed, request)
      redis.call('HSET', 'cotrain:sample:' .. request, 'state', 'claimed', 'holder', me)
      return request
    end
  end
end

local requests = {}
while #requests < most do
  local request = claim_next()
  if not request then
    break
  end
  requests[#requests + 1] = request
end
if #requests > 0 then
  redis.call('DEL', last_claim)
  redis.call('RPUSH', last_claim, token)
  for _, request in ipairs(requests) do
    redis.call('RPUSH', last_claim, request)
  end
end
return rows_of(requests)
